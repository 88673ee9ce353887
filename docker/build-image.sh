#!/bin/sh
# Builds the ZooKeeper image that tests use where the official one is out of reach.
#
#     docker/build-image.sh            zklock-zookeeper:3.9, of Debian trixie   (ZooKeeper 3.9.3)
#     docker/build-image.sh bookworm   zklock-zookeeper:3.8, of Debian bookworm (ZooKeeper 3.8.0)
#     docker/build-image.sh --force    builds it anew
#     docker/build-image.sh --for PID  gives up when that process is gone
#
# Needs Docker and Debian's package mirror, no image registry: without `debian:<suite>` the base is
# bootstrapped from packages. Takes one to three minutes, once; does nothing if the image is there.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
started=$(date +%s)
work=
step_pid=
own_group=$(command -v setsid || true)
one_file_system= # where a root folder with mounts in it may be removed
build=
built=no
bootstrapped=

main() {
    force=no
    suite=trixie
    for_whom=$$
    while [ $# -gt 0 ]; do
        case $1 in
        --force) force=yes ;;
        --for) for_whom=${2:?whose process} && shift ;;
        trixie | bookworm) suite=$1 ;;
        -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0" && exit ;;
        *) fail "unknown argument '$1'; use: $0 [--force] [--for PID] [trixie|bookworm]" ;;
        esac
        shift
    done
    case $suite in
    trixie) image=zklock-zookeeper:3.9 ;;
    bookworm) image=zklock-zookeeper:3.8 ;;
    esac

    command -v docker >/dev/null || fail "the command 'docker' is missing"
    docker version >/dev/null 2>&1 || fail "Docker does not answer: $(docker version 2>&1 >/dev/null | tail -n 1)"
    if [ $force = no ] && present "$image"; then
        say "$image is there already; --force builds it anew"
        exit
    fi

    trap clean_up EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    work=$(mktemp -d "${TMPDIR:-/tmp}/zklock-image.XXXXXX")

    wait_for_other_builds
    if [ $force = no ] && present "$image"; then
        say "$image has been built meanwhile"
        exit
    fi

    say "building $image from Debian $suite; this happens once and takes one to three minutes"
    build=$suite-$started-$$
    find_base
    # The network of the host, because a container's own often lacks a name server.
    before=$(docker image inspect --format '{{.Id}}' "$image" 2>/dev/null || true)
    step "installing ZooKeeper on it" docker build --force-rm --network host \
        --build-arg "BASE=$base" --build-arg "BUILD=$build" \
        --build-arg http_proxy --build-arg https_proxy --build-arg no_proxy \
        --tag "$image" "$here"
    built=yes
    [ -z "$before" ] || docker rmi "$before" >/dev/null 2>&1 || say "the image before stays; something uses it"
    say "$image is ready"
}

# Sets $base to an image of the plain Debian.
find_base() {
    base=debian:$suite
    if present "$base"; then
        say "base: $base"
    elif quick_pull "$base"; then
        say "base: $base, pulled"
    else
        say "base: $base cannot be pulled, so one is bootstrapped from Debian's packages"
        bootstrap
        base=zklock-debian:$build
        bootstrapped=$base
        step "importing it" docker import --change "LABEL zklock.build=$build" "$work/base.tar" "$base"
    fi
}

quick_pull() {
    command -v timeout >/dev/null || return 1
    timeout 90 docker pull --quiet "$1" >/dev/null 2>&1
}

# Writes $work/base.tar.
bootstrap() {
    one_file_system=--one-file-system
    if find_mmdebstrap; then
        if [ "$(id -u)" = 0 ]; then
            # shellcheck disable=SC2086
            step "bootstrapping Debian $suite with mmdebstrap" \
                $mmdebstrap --variant=apt --include=ca-certificates $keyring "$suite" "$work/base.tar"
        else
            bootstrap_in_a_container
        fi
    elif command -v debootstrap >/dev/null && [ "$(id -u)" = 0 ]; then
        step "bootstrapping Debian $suite with debootstrap" \
            debootstrap --variant=minbase --include=ca-certificates "$suite" "$work/base"
        step "packing it" tar -C "$work/base" --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' \
            -cf "$work/base.tar" .
    else
        fail "no base for the image: $base can neither be found nor pulled, and there is neither" \
            "mmdebstrap nor (as root) debootstrap to bootstrap one, nor apt-get to fetch them with." \
            "Install mmdebstrap, or have $base at hand."
    fi
}

# Who may use Docker is root in its containers, which saves being root here or having user namespaces.
# The container's files are only unpacked, not installed, which anyone may do and is enough for this.
bootstrap_in_a_container() {
    # shellcheck disable=SC2086
    step "unpacking mmdebstrap and what it needs, for a container" \
        $mmdebstrap --mode=chrootless --variant=extract $keyring --include="$(echo $TOOLS | tr ' ' ,)" \
        trixie "$work/tools.tar"
    step "importing that" docker import --change "LABEL zklock.build=$build" "$work/tools.tar" "zklock-tools:$build"
    # shellcheck disable=SC2016
    step "bootstrapping Debian $suite with mmdebstrap, in the container" sh -c '
        docker run --rm --network host --tmpfs /tmp:exec,dev,suid \
            --env http_proxy --env https_proxy --env no_proxy "$1" \
            mmdebstrap --mode=root --aptopt="APT::Sandbox::User \"root\"" \
            --variant=apt --include=ca-certificates --format=tar "$2" - >"$3"' \
        sh "zklock-tools:$build" "$suite" "$work/base.tar"
    docker rmi "zklock-tools:$build" >/dev/null
}

TOOLS="mmdebstrap debian-archive-keyring ca-certificates base-files bash coreutils dash debianutils diffutils
    findutils gpgv grep gzip hostname libc-bin mawk mount sed tar util-linux"

# Sets $mmdebstrap to a command and $keyring to its option, if it needs one.
find_mmdebstrap() {
    mmdebstrap=mmdebstrap
    keyring=
    if ! command -v mmdebstrap >/dev/null || [ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ]; then
        command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
        fetch_mmdebstrap
    fi
    $mmdebstrap --version >/dev/null 2>&1
}

# The packages are unpacked in the work folder, which leaves this machine as it was; only where the
# program does not run from there (for want of perl's modules) is it installed, if we may.
fetch_mmdebstrap() {
    mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial" "$work/tools"
    step "fetching mmdebstrap, which is not installed here" sh -ec '
        cd "$1/tools"
        set -- -q -o Dir::State::Lists="$1/apt/lists" -o Dir::Cache="$1/apt/cache" -o APT::Sandbox::User=root
        apt-get "$@" update
        apt-get "$@" download mmdebstrap debian-archive-keyring
        for package in *.deb; do dpkg -x "$package" .; done' sh "$work"
    if [ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ]; then
        keyring=--keyring=$work/tools/usr/share/keyrings/debian-archive-keyring.gpg
    fi
    command -v mmdebstrap >/dev/null || mmdebstrap=$work/tools/usr/bin/mmdebstrap
    if ! $mmdebstrap --version >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
        step "installing mmdebstrap, which does not run without being installed" sh -ec '
            apt-get -q update
            DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends mmdebstrap'
        mmdebstrap=mmdebstrap
    fi
}

# Test programs that start at the same time would all build: one does, the others wait for it.
wait_for_other_builds() {
    command -v flock >/dev/null || return 0
    exec 9<"$here/Dockerfile" # any file that all of them open will do
    flock -n 9 && return
    say "another build is running; waiting for it"
    $own_group flock 9 &
    step_pid=$!
    wait $step_pid
    step_pid=
}

# step TITLE COMMAND...: runs the command with its output in a file, says every few seconds where it
# is, and shows the end of the file if it fails. In the background, so that a signal finds us waiting,
# and in a group of its own, because mmdebstrap ends only if its children do.
step() {
    title=$1
    shift
    say "$title"
    log=$work/log
    TMPDIR=$work $own_group "$@" >"$log" 2>&1 </dev/null 9>&- &
    step_pid=$!
    quiet=0
    while kill -0 $step_pid 2>/dev/null; do
        sleep 0.2 9>&- & # so that the shell waits in `wait`, which a signal interrupts
        wait $! || true
        kill -0 "$for_whom" 2>/dev/null || fail "who wanted the image is gone"
        quiet=$((quiet + 1))
        if [ $quiet -ge 50 ]; then
            quiet=0
            say "  ... $(tail -n 1 "$log" | tr -d '\r' | cut -c 1-90)"
        fi
    done
    status=0
    wait $step_pid || status=$?
    step_pid=
    [ $status != 0 ] || return 0
    tail -n 40 "$log" >&2
    fail "$title: '$1' failed with status $status; the end of its output is above"
}

clean_up() {
    trap '' HUP INT TERM
    [ -z "$step_pid" ] || end_step
    # What the image is built on stays as its first layer; only the name goes.
    [ -z "$bootstrapped" ] || docker rmi --force "$bootstrapped" >/dev/null 2>&1 || true
    [ -z "$build" ] || [ $built = yes ] || remove_half_built
    [ -z "$work" ] || rm -rf $one_file_system "$work"
}

# mmdebstrap heeds SIGINT at once but SIGTERM late; whatever is still there after 5 s is killed.
end_step() {
    kill -INT ${own_group:+-}$step_pid 2>/dev/null || true
    kill -TERM ${own_group:+-}$step_pid 2>/dev/null || true
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        kill -0 ${own_group:+-}$step_pid 2>/dev/null || break
        sleep 0.25
    done
    kill -KILL ${own_group:+-}$step_pid 2>/dev/null || true
    wait $step_pid 2>/dev/null || true
}

# The engine may still be at work when the command that asked for it is gone.
remove_half_built() {
    for _ in 1 2 3 4 5 6 7 8; do
        docker ps --all --quiet --filter "label=zklock.build=$build" | xargs -r docker rm --force --volumes >/dev/null 2>&1 || true
        docker images --quiet --filter "label=zklock.build=$build" | xargs -r docker rmi >/dev/null 2>&1 || true
        sleep 0.25
    done
}

present() { docker image inspect "$1" >/dev/null 2>&1; }

say() { printf '[%3d s] %s\n' $(($(date +%s) - started)) "$*"; }

fail() {
    printf 'build-image.sh: %s\n' "$*" >&2
    exit 1
}

main "$@"
