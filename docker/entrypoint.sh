#!/bin/sh
# Writes the configuration from the official image's variables and starts the server.
#
#   ZOO_MY_ID                    this server's number in the ensemble (1)
#   ZOO_SERVERS                  "server.1=zoo1:2888:3888;2181 server.2=..." (this server alone)
#   ZOO_STANDALONE_ENABLED       whether one server alone runs without a quorum (true)
#   ZOO_TICK_TIME                milliseconds (2000); sessions time out after 2 to 20 ticks
#   ZOO_INIT_LIMIT               ticks a follower may take to connect to its leader (5)
#   ZOO_SYNC_LIMIT               ticks a follower may lag behind (2)
#   ZOO_MAX_CLIENT_CNXNS         connections from one address, 0 for any number (60)
#   ZOO_4LW_COMMANDS_WHITELIST   four-letter words that are answered (srvr)
#   ZOO_ADMINSERVER_ENABLED      the HTTP server on port 8080 (true)
#   ZOO_CFG_EXTRA                more lines for zoo.cfg, "key=value key=value ..."
#   ZOO_LOG_LEVEL                trace, debug, info, warn or error (info)
#   ZK_SERVER_HEAP               megabytes (512)
#   JVMFLAGS, SERVER_JVMFLAGS    more options for java
#
# A /conf/zoo.cfg that is there already is used as it is.
set -eu

# Debian's jars that a server loads. Naming them, in place of all of /usr/share/java, saves start-up
# time and leaves one slf4j binding, the one which writes to stderr.
JARS="zookeeper zookeeper-jute slf4j-api slf4j-simple
    netty-handler netty-transport netty-common netty-buffer netty-codec netty-resolver
    netty-transport-native-unix-common netty-transport-native-epoll
    snappy-java metrics-core commons-cli commons-io
    jackson-core jackson-databind jackson-annotations
    jetty9-server jetty9-servlet jetty9-http jetty9-io jetty9-util jetty9-util-ajax jetty9-security servlet-api"

write_config() {
    cat <<CONFIG
dataDir=/data
dataLogDir=/datalog
tickTime=${ZOO_TICK_TIME:-2000}
initLimit=${ZOO_INIT_LIMIT:-5}
syncLimit=${ZOO_SYNC_LIMIT:-2}
autopurge.snapRetainCount=${ZOO_AUTOPURGE_SNAPRETAINCOUNT:-3}
autopurge.purgeInterval=${ZOO_AUTOPURGE_PURGEINTERVAL:-0}
maxClientCnxns=${ZOO_MAX_CLIENT_CNXNS:-60}
standaloneEnabled=${ZOO_STANDALONE_ENABLED:-true}
admin.enableServer=${ZOO_ADMINSERVER_ENABLED:-true}
4lw.commands.whitelist=${ZOO_4LW_COMMANDS_WHITELIST:-srvr}
CONFIG
    printf '%s\n' ${ZOO_SERVERS:-server.1=localhost:2888:3888;2181} ${ZOO_CFG_EXTRA:-}
}

set -f # the whitelist's `*` is not a file name
[ -f /conf/zoo.cfg ] || write_config >/conf/zoo.cfg
[ -f /data/myid ] || echo "${ZOO_MY_ID:-1}" >/data/myid

class_path=/conf
for jar in $JARS; do
    [ ! -f "/usr/share/java/$jar.jar" ] || class_path="$class_path:/usr/share/java/$jar.jar"
done

# The folders may be mounted, and then they are root's.
as_zookeeper=
if [ "$(id -u)" = 0 ]; then
    chown -R zookeeper:zookeeper /data /datalog
    as_zookeeper="setpriv --reuid=zookeeper --regid=zookeeper --clear-groups"
fi

# Every variable here is a list of words.
# shellcheck disable=SC2086
exec $as_zookeeper java -Xmx"${ZK_SERVER_HEAP:-512}m" -XX:+UseSerialGC \
    -Dzookeeper.jmx.log4j.disable=true \
    -Dorg.slf4j.simpleLogger.defaultLogLevel="${ZOO_LOG_LEVEL:-info}" \
    -Dorg.slf4j.simpleLogger.showDateTime=true \
    -Dorg.slf4j.simpleLogger.dateTimeFormat="yyyy-MM-dd HH:mm:ss.SSS" \
    ${JVMFLAGS:-} ${SERVER_JVMFLAGS:-} \
    -cp "$class_path" org.apache.zookeeper.server.quorum.QuorumPeerMain /conf/zoo.cfg
