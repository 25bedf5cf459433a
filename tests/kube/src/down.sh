# Removes the cluster in the directory $1: processes, control groups, links, files. Nothing that is
# not its own: processes carry the directory in their environment, the rest is named in its files.
#
# In shell because it has to outlive whoever started the cluster, and that may be a test binary,
# which cannot be started again as something else.
set -u
dir=$1
[ -f "$dir/cluster" ] || exit 0 # not a cluster's

marked() { grep -lzxF -e "K8E_KUBE_DIR=$dir" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }

# Containers have an environment of their own, and are in the cluster's control groups instead.
cgroups() {
    [ -s "$dir/cgroup" ] || return 0
    for root in /sys/fs/cgroup /sys/fs/cgroup/*; do
        [ -d "$root/$(cat "$dir/cgroup")" ] && find "$root/$(cat "$dir/cgroup")" -depth -type d
    done
}
contained() { cgroups | while read -r group; do cat "$group/cgroup.procs"; done 2>/dev/null; }

# A process may start another while we look: until there is none, for at most 20 seconds.
round=0
while pids=$(marked; contained) && [ -n "$pids" ] && [ "$round" -lt 200 ]; do
    kill -KILL $pids 2>/dev/null
    round=$((round + 1))
    sleep 0.1
done
cgroups | while read -r group; do rmdir "$group"; done 2>/dev/null

if [ -s "$dir/links" ]; then
    while read -r link; do ip link delete "$link" 2>/dev/null; done <"$dir/links"
fi
while read -r _ mounted _; do
    case $mounted in "$dir"/*) umount -l "$mounted" ;; esac
done </proc/mounts

if [ -n "$pids" ]; then
    echo "processes of $dir do not end: $pids" >&2
    exit 1
fi
rm -rf "$dir"
