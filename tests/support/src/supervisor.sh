#!/bin/sh
# Outlives the test process and clears away what it started, however that ended: the end of our
# standard input is its death. Answers "ok" to each line it carried out.
#
# $1 a folder, made by the test process and removed here; $2 the label of containers that are removed;
# what follows is the command of a local server, for "run".
folder=$1
label=$2
shift 2
trap '' HUP INT TERM # Ctrl-C is for the others
pid=
container=no

while read -r line; do
    case $line in
    run)
        "$@" >>"$folder/log" 2>&1 &
        pid=$!
        ;;
    kill)
        kill -KILL "$pid"
        wait "$pid"
        pid=
        ;;
    # The engine may be at work on a container while its client dies: until we hear "created" (or
    # failed), one may appear that is not there yet.
    creating) container=maybe ;;
    created) container=yes ;;
    esac
    echo ok
done 2>/dev/null

if [ -n "$pid" ]; then
    kill -KILL "$pid"
    wait "$pid"
fi 2>/dev/null
rm -rf "$folder"

containers() { docker ps --all --quiet --no-trunc --filter "label=$label"; }

case $container in
no) exit 0 ;;
yes) looks=1 ;;
maybe) looks=40 ;;
esac
while [ $looks -gt 0 ] && found=$(containers) && [ -z "$found" ]; do
    looks=$((looks - 1))
    [ $looks = 0 ] || sleep 0.25
done
tries=10
while found=$(containers) && [ -n "$found" ]; do
    # shellcheck disable=SC2086
    docker rm --force --volumes $found >/dev/null 2>&1 && exit 0
    tries=$((tries - 1))
    [ $tries -gt 0 ] || exit 1
    sleep 0.25
done
