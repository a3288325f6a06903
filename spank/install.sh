#!/bin/sh
# Put sres.so where Slurm looks for plugins, and name it in plugstack.conf.d; `make install` calls it.
#
#   install.sh install SRES.SO SUPERVISOR
#   install.sh uninstall
#
# PLUGINDIR and CONFDIR name Slurm's plugins and the directory of slurm.conf; what is empty is looked up.
# DESTDIR goes before every path, for packages.
set -eu

say() {
    printf 'sres.so: %s\n' "$*"
}

die() {
    printf 'sres.so: error: %s\n' "$*" >&2
    exit 1
}

# The value of one line of `scontrol show config`; nothing when Slurm does not answer here.
slurm_setting() {
    command -v scontrol >/dev/null || return 0
    timeout 10 scontrol show config 2>/dev/null | sed -n "s/^$1 *= *//p"
}

find_plugins() {
    # PluginDir may name several directories, joined by ":".
    for directory in $(slurm_setting PluginDir | tr : ' ') \
        /usr/lib/*/slurm-wlm /usr/lib64/slurm /usr/lib/slurm /usr/lib/*/slurm \
        /usr/local/lib/slurm /usr/local/lib64/slurm /opt/slurm/lib/slurm /opt/slurm/lib64/slurm; do
        # A directory with Slurm's own plugins in it.
        for plugin in "$directory"/auth_*.so "$directory"/select_*.so; do
            [ -e "$plugin" ] || continue
            printf '%s\n' "$directory"
            return
        done
    done
    die "Slurm's plugins were not found; name their directory, which is PluginDir in" \
        "\`scontrol show config\`: make install PLUGINDIR=DIR"
}

find_configuration() {
    file=${SLURM_CONF:-$(slurm_setting SLURM_CONF)}
    if [ -n "$file" ]; then
        dirname "$file"
        return
    fi
    for directory in /etc/slurm /etc/slurm-llnl /usr/local/etc/slurm /usr/local/etc /opt/slurm/etc; do
        if [ -e "$directory/slurm.conf" ] || [ -e "$directory/plugstack.conf" ]; then
            printf '%s\n' "$directory"
            return
        fi
    done
    printf '/etc/slurm\n'
}

# True when plugstack.conf includes every file of plugstack.conf.d.
is_included() {
    grep -Eqs '^[[:space:]]*include[[:space:]]+.*plugstack\.conf\.d/\*' "$1/plugstack.conf"
}

install_plugin() {
    file=$1 supervisor=$2
    install -D -m 0755 "$file" "$DESTDIR$plugins/sres.so"
    say "installed $DESTDIR$plugins/sres.so"
    line="optional $plugins/sres.so supervisor=$supervisor"
    case $configuration in
        /run/*)
            # slurmd fetched it from slurmctld, and fetches it again over whatever is written here.
            say "this machine has its configuration from slurmctld; add there, to plugstack.conf:"
            printf '    %s\n' "$line"
            return
            ;;
    esac
    mkdir -p "$DESTDIR$configuration/plugstack.conf.d"
    printf '# Written by slurm-resilience: srun --auto-resume=1.\n%s\n' "$line" \
        >"$DESTDIR$configuration/plugstack.conf.d/sres.conf"
    say "wrote $DESTDIR$configuration/plugstack.conf.d/sres.conf"
    [ -z "$DESTDIR" ] || return 0
    is_included "$configuration" || {
        say "plugstack.conf does not include it yet; add this line to $configuration/plugstack.conf:"
        printf '    include %s/plugstack.conf.d/*.conf\n' "$configuration"
    }
    [ -x "$supervisor" ] || say "warning: $supervisor is not there: srun --auto-resume=1 is refused" \
        "until it is (SUPERVISOR= names another one)"
}

uninstall_plugin() {
    # First the line, then the file that it names: a job may start in between.
    rm -f "$DESTDIR$configuration/plugstack.conf.d/sres.conf" "$DESTDIR$plugins/sres.so"
    say "removed from $DESTDIR$plugins and $DESTDIR$configuration/plugstack.conf.d"
    if [ -z "$DESTDIR" ] && grep -qs 'sres\.so' "$configuration/plugstack.conf"; then
        say "$configuration/plugstack.conf still names it; take that line out"
    fi
}

: "${DESTDIR:=}"
plugins=${PLUGINDIR:-$(find_plugins)}
configuration=${CONFDIR:-$(find_configuration)}
case ${1:-} in
    install) install_plugin "$2" "$3" ;;
    uninstall) uninstall_plugin ;;
    *) die "usage: install.sh install FILE SUPERVISOR | uninstall" ;;
esac
