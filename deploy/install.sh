#!/bin/sh
# Installs, upgrades or removes k8e on a Linux machine.
#
#   sh install.sh                install, or upgrade: sessions are kept
#   sh install.sh --uninstall    remove everything, sessions and their files too
#   sh install.sh --help
#
# It writes the binary, one service and one settings file. It changes no firewall, swap, kernel setting or shell file.
set -eu

# Filled in by `cargo xtask release --key`: the PEM of the Ed25519 key that signs SHA256SUMS.
PUBLIC_KEY=''
RELEASES=https://github.com/k8e/k8e/releases

BIN_DIR=${INSTALL_K8E_BIN_DIR:-/usr/local/bin}
EXEC=${INSTALL_K8E_EXEC:-server}
CONFIG_DIR=/etc/k8e
ENV_FILE=$CONFIG_DIR/k8e.env
UNIT=/etc/systemd/system/k8e.service
LOG_DIR=/var/log/k8e

# Seconds: a start makes warm sandboxes on a machine that may be busy; a stop drains calls.
START_WITHIN=120
STOP_WITHIN=60

usage() {
    cat <<'TEXT'
usage: sh install.sh [--uninstall | --help]

Installs k8e as a service (systemd where it runs, else a plain process), or upgrades it. Sessions are kept.

environment:
  INSTALL_K8E_VERSION        release to install, for example v0.1.0 (latest)
  INSTALL_K8E_URL            URL or directory with the files of a release (the project's releases)
  INSTALL_K8E_BIN_DIR        directory of the binary (/usr/local/bin)
  INSTALL_K8E_EXEC           arguments of the service: a role and its flags (server)
  INSTALL_K8E_PUBLIC_KEY     file with the PEM of the key that must have signed the release
  INSTALL_K8E_SKIP_DOWNLOAD  =true: the binary is there already
  INSTALL_K8E_SKIP_ENABLE    =true: do not start at boot
  INSTALL_K8E_SKIP_START     =true: do not start now
  K8E_*                      settings of the server, for example K8E_DATA_DIR; kept in /etc/k8e/k8e.env (mode 0600)
TEXT
}

info() { printf '%s\n' "$*" >&2; }
die() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 1
}
is_true() { [ "${1:-}" = true ] || [ "${1:-}" = 1 ]; }
has() { command -v "$1" >/dev/null 2>&1; }

check_machine() {
    [ "$(uname -s)" = Linux ] || die "k8e server needs Linux; on other systems use the client, k8e-sandbox-cli"
    [ "$(id -u)" = 0 ] || die "this needs root: sudo sh install.sh"
    case $(uname -m) in
        x86_64 | amd64) ARCH=amd64 ;;
        aarch64 | arm64) ARCH=arm64 ;;
        *) die "no release for $(uname -m): build it from source, see the README" ;;
    esac
    DATA_DIR=${K8E_DATA_DIR:-$(kept_setting K8E_DATA_DIR)}
    DATA_DIR=${DATA_DIR:-/var/lib/k8e}
    for name in $(setting_names) EXEC BIN_DIR; do
        eval "value=\${$name-}"
        # shellcheck disable=SC2154
        case $value in
            *'
'*) die "$name has a line break" ;;
        esac
    done
    case $BIN_DIR in /*) ;; *) die "INSTALL_K8E_BIN_DIR must be absolute: $BIN_DIR" ;; esac
    case $DATA_DIR in /?*) ;; *) die "K8E_DATA_DIR must be absolute: $DATA_DIR" ;; esac
}

uses_systemd() { [ -d /run/systemd/system ] && has systemctl; }

# --- files of a release -----------------------------------------------------------------------------------------------

# fetch NAME: the file of that name, into $TMP.
fetch() {
    case $SOURCE in
        /*)
            [ -f "$SOURCE/$1" ] || return 1
            cp "$SOURCE/$1" "$TMP/$1"
            ;;
        https://* | http://127.0.0.1:* | http://localhost:*)
            if has curl; then
                curl --fail --silent --show-error --location --proto-redir =https,http --retry 3 \
                    --connect-timeout 20 --output "$TMP/$1" "$SOURCE/$1"
            elif has wget; then
                wget --quiet --tries=3 --timeout=60 --output-document="$TMP/$1" "$SOURCE/$1"
            else
                die "curl or wget is needed to download k8e"
            fi
            ;;
        *) die "INSTALL_K8E_URL must be https:// or an absolute directory: $SOURCE" ;;
    esac
}

source_of_release() {
    if [ -n "${INSTALL_K8E_URL:-}" ]; then
        SOURCE=${INSTALL_K8E_URL%/}
    elif [ -n "${INSTALL_K8E_VERSION:-}" ]; then
        SOURCE=$RELEASES/download/$INSTALL_K8E_VERSION
    else
        SOURCE=$RELEASES/latest/download
    fi
}

# The sums are signed, the files are not: a file is as good as its sum.
check_signature() {
    key=$TMP/key.pem
    if [ -n "${INSTALL_K8E_PUBLIC_KEY:-}" ]; then
        cp "$INSTALL_K8E_PUBLIC_KEY" "$key" || die "INSTALL_K8E_PUBLIC_KEY: cannot read $INSTALL_K8E_PUBLIC_KEY"
    elif [ -n "$PUBLIC_KEY" ]; then
        printf '%s\n' "$PUBLIC_KEY" >"$key"
    else
        info "note: this install.sh has no key, so only checksums are verified"
        return 0
    fi
    has openssl || die "openssl is needed to verify the signature of the release: install it and try again"
    fetch SHA256SUMS.sig || die "the release has no SHA256SUMS.sig"
    openssl pkeyutl -verify -rawin -pubin -inkey "$key" -in "$TMP/SHA256SUMS" -sigfile "$TMP/SHA256SUMS.sig" \
        >/dev/null 2>&1 || die "the signature of SHA256SUMS is wrong: nothing was installed"
}

check_sum() {
    has sha256sum || die "sha256sum is needed to verify the release"
    wanted=$(sed -n "s/^\([0-9a-f]\{64\}\) [ *]$1\$/\1/p" "$TMP/SHA256SUMS")
    [ -n "$wanted" ] || die "SHA256SUMS does not name $1: nothing was installed"
    got=$(sha256sum "$TMP/$1" | cut -d ' ' -f 1)
    [ "$wanted" = "$got" ] || die "the checksum of $1 is wrong (expected $wanted, got $got): nothing was installed"
}

download() {
    source_of_release
    binary=k8e-linux-$ARCH
    info "getting $binary from $SOURCE"
    fetch SHA256SUMS || die "cannot get SHA256SUMS from $SOURCE"
    check_signature
    fetch "$binary" || die "cannot get $binary from $SOURCE"
    check_sum "$binary"
    fetch k8e.service || die "cannot get k8e.service from $SOURCE"
    check_sum k8e.service
    chmod 755 "$TMP/$binary"
    version=$("$TMP/$binary" --version) || die "$binary does not run on this machine: nothing was installed"
}

install_binary() {
    mkdir -p "$BIN_DIR"
    # In the same directory, then renamed: there is never half a binary, and a running server keeps the old one.
    new=$BIN_DIR/.k8e.new.$$
    if ! { cp "$TMP/$binary" "$new" && chmod 755 "$new" && mv -f "$new" "$BIN_DIR/k8e"; }; then
        rm -f "$new"
        die "cannot write $BIN_DIR/k8e"
    fi
    info "installed $version as $BIN_DIR/k8e"
}

# --- the service ------------------------------------------------------------------------------------------------------

# Names of the K8E_* variables of this call, without those of clients: a key of a person is none of the server's.
setting_names() {
    env | sed -n 's/^\(K8E_[A-Z0-9_]*\)=.*/\1/p' | sort -u |
        grep -Evx 'K8E_NO_AUTOSTART|K8E_SANDBOX_(APIKEY|ENDPOINT|CERT|CERT_DIR|SESSION_ID|TENANT|DEVICE_NAME)' || true
}

# Keeps the variables of this call, and those of earlier ones that it does not have. Quoted for systemd and sh alike.
write_settings() {
    mkdir -p "$CONFIG_DIR"
    (
        umask 077
        {
            [ ! -e "$ENV_FILE" ] || while IFS= read -r line; do
                setting_names | grep -qx "${line%%=*}" || printf '%s\n' "$line"
            done <"$ENV_FILE"
            for name in $(setting_names); do
                eval "value=\${$name-}"
                printf '%s="%s"\n' "$name" "$(printf '%s' "$value" | sed 's/[\\"$`]/\\&/g')"
            done
        } >"$ENV_FILE.new"
    )
    mv -f "$ENV_FILE.new" "$ENV_FILE"
}

# A setting that an earlier call kept.
kept_setting() {
    [ -e "$ENV_FILE" ] || return 0
    sed -n "s/^$1=\"\(.*\)\"\$/\1/p" "$ENV_FILE" | sed 's/\\\(.\)/\1/g'
}

write_unit() {
    sed -e "s|@BIN_DIR@|$(escaped "$BIN_DIR")|" -e "s|@EXEC@|$(escaped "$EXEC")|" "$TMP/k8e.service" >"$UNIT.new"
    mv -f "$UNIT.new" "$UNIT"
    systemctl daemon-reload
}

# For the right side of sed's s|…|…|.
escaped() { printf '%s' "$1" | sed 's/[\\|&]/\\&/g'; }

# The process id of the server of the data directory, if it runs.
server_pid() {
    pid=$(head -c 16 "$DATA_DIR/lock" 2>/dev/null || true)
    case $pid in '' | *[!0-9]*) return 1 ;; esac
    # A number that another process got since is not the server's.
    case $(readlink "/proc/$pid/exe" 2>/dev/null || true) in
        */k8e | */k8e' (deleted)') printf '%s' "$pid" ;;
        *) return 1 ;;
    esac
}

# A graceful stop: sandboxes keep running.
stop() {
    if uses_systemd && [ -e "$UNIT" ]; then
        systemctl stop k8e.service || true
    fi
    left=$STOP_WITHIN
    while pid=$(server_pid); do
        [ "$left" = "$STOP_WITHIN" ] && { kill -TERM "$pid" 2>/dev/null || true; }
        [ "$left" -gt 0 ] || die "the server (process $pid) does not stop: see its log, then try again"
        sleep 1
        left=$((left - 1))
    done
}

start() {
    started=
    if uses_systemd; then
        write_unit
        is_true "${INSTALL_K8E_SKIP_ENABLE:-}" || systemctl --quiet enable k8e.service
        is_true "${INSTALL_K8E_SKIP_START:-}" && return 0
        systemctl restart k8e.service
        log='journalctl -u k8e'
    else
        is_true "${INSTALL_K8E_SKIP_START:-}" && return 0
        mkdir -p "$LOG_DIR"
        # Arguments are words here, as systemd takes them.
        # shellcheck disable=SC2086
        (
            set -a
            # shellcheck disable=SC1090
            . "$ENV_FILE"
            set +a
            umask 077
            exec setsid "$BIN_DIR/k8e" $EXEC >>"$LOG_DIR/server.log" 2>&1 </dev/null
        ) &
        started=$!
        log="cat $LOG_DIR/server.log"
        info "systemd does not run here: started a process; start it at boot with: $BIN_DIR/k8e $EXEC"
    fi
    case $EXEC in server | 'server '*) ;; *) return 0 ;; esac
    left=$START_WITHIN
    until [ -S "$DATA_DIR/k8e.sock" ] && K8E_DATA_DIR=$DATA_DIR "$BIN_DIR/k8e" sandbox status >/dev/null 2>&1; do
        if [ -n "$started" ] && ! kill -0 "$started" 2>/dev/null; then
            tail -n 3 "$LOG_DIR/server.log" >&2
            die "the server ended at once: $log"
        fi
        [ "$left" -gt 0 ] || die "the server does not answer after $START_WITHIN seconds: $log"
        sleep 1
        left=$((left - 1))
    done
    info "the server runs; log: $log"
    info "try: k8e sandbox run \"print('hello')\" --lang python --raw"
}

# --- uninstall --------------------------------------------------------------------------------------------------------

destroy_sessions() {
    [ -x "$BIN_DIR/k8e" ] || return 0
    server_pid >/dev/null || return 0
    ids=$(K8E_DATA_DIR=$DATA_DIR "$BIN_DIR/k8e" sandbox sessions 2>/dev/null |
        sed 's/"session_id"/\
&/g' | sed -n 's/^"session_id":"\([a-z0-9-]*\)".*/\1/p')
    for id in $ids; do
        K8E_DATA_DIR=$DATA_DIR "$BIN_DIR/k8e" sandbox destroy "$id" >/dev/null 2>&1 || info "session $id: not destroyed"
    done
}

uninstall() {
    # Only what a server made: a mistyped path keeps what it has.
    if [ -e "$DATA_DIR" ] && [ ! -e "$DATA_DIR/lock" ]; then
        die "$DATA_DIR is not a data directory of k8e: nothing was removed"
    fi
    if [ -e "$DATA_DIR" ] && ! server_pid >/dev/null && [ -x "$BIN_DIR/k8e" ] && [ -s "$DATA_DIR/lock" ]; then
        # Its sandboxes run on: a server has to end them.
        K8E_DATA_DIR=$DATA_DIR "$BIN_DIR/k8e" sandbox status >/dev/null 2>&1 || true
    fi
    destroy_sessions
    stop
    if uses_systemd && [ -e "$UNIT" ]; then
        systemctl --quiet disable k8e.service || true
        rm -f "$UNIT"
        systemctl daemon-reload
    fi
    remove_groups
    rm -rf "$DATA_DIR" "$LOG_DIR" "$CONFIG_DIR"
    rm -f "$BIN_DIR/k8e"
    info "k8e is removed"
}

# Control groups of k8e in which nothing is; rmdir takes no others.
remove_groups() {
    for dir in /sys/fs/cgroup/k8e /sys/fs/cgroup/*/k8e; do
        if [ -d "$dir" ]; then
            find "$dir" -depth -type d -exec rmdir {} + 2>/dev/null || true
        fi
    done
}

# ----------------------------------------------------------------------------------------------------------------------

main() {
    case ${1:-} in
        --help | -h)
            usage
            exit 0
            ;;
        --uninstall | '') ;;
        *)
            usage >&2
            exit 2
            ;;
    esac
    check_machine
    TMP=$(mktemp -d)
    trap 'rm -rf "$TMP"' EXIT
    trap 'exit 130' INT TERM
    if [ "${1:-}" = --uninstall ]; then
        uninstall
        return
    fi
    if is_true "${INSTALL_K8E_SKIP_DOWNLOAD:-}"; then
        [ -x "$BIN_DIR/k8e" ] || die "INSTALL_K8E_SKIP_DOWNLOAD: there is no $BIN_DIR/k8e"
        if uses_systemd && [ ! -e "$UNIT" ]; then
            source_of_release
            fetch k8e.service || die "cannot get k8e.service from $SOURCE"
        elif uses_systemd; then
            cp "$UNIT" "$TMP/k8e.service"
        fi
    else
        download
        install_binary
    fi
    write_settings
    if is_true "${INSTALL_K8E_SKIP_START:-}"; then
        info "not started (INSTALL_K8E_SKIP_START)"
    else
        stop
    fi
    start
}

main "$@"
