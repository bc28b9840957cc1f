#!/bin/sh
# An emulated cluster: network namespaces joined by bridges, links shaped with `tc tbf`. Profiles it with two
# gloo ranks a node and compares the measured bandwidth with the shaped one.
#
#     benchmarks/two_tier.sh [MBIT] [OUTPUT]                  two nodes, MBIT each; 0: not shaped
#     benchmarks/two_tier.sh [MBIT] [OUTPUT] ACROSS_MBIT      four nodes in two racks, ACROSS_MBIT between racks
#
# Needs root and iproute2; says why and ends with 0 where that is not permitted. Cleans up after itself.
set -eu
MBIT=${1:-200}
OUTPUT=${2:-two_tier.yaml}
ACROSS=${3:-}
PYTHON=${PYTHON:-python3}
NAME=tpp$$
PORT=$((20000 + $$ % 20000))
RACKS="0"
NODES="0 1"
if [ -n "$ACROSS" ]; then
    RACKS="0 1"
    NODES="0 1 2 3"
fi

skip() {
    echo "two_tier: skipped: $1" >&2
    exit 0
}
[ "$(id -u)" = 0 ] || skip "needs root for network namespaces"
command -v ip >/dev/null && command -v tc >/dev/null || skip "needs iproute2 (ip and tc)"

clean() {
    for n in $NODES; do ip netns del "$NAME-$n" 2>/dev/null || true; done
    for r in $RACKS; do ip link del "$NAME-r$r" 2>/dev/null || true; done
    ip link del "$NAME-x0" 2>/dev/null || true
}
trap clean EXIT INT TERM

shape() { # DEVICE MBIT BURST COMMAND...: what it sends is held to so many Mb/s, but for a burst
    device=$1 mbit=$2 burst=$3
    shift 3
    "$@" tc qdisc add dev "$device" root tbf rate "${mbit}mbit" burst "$burst" latency 200ms ||
        skip "tc tbf is not permitted here"
}
for r in $RACKS; do
    ip link add "$NAME-r$r" type bridge 2>/dev/null || skip "bridges are not permitted here"
    ip link set "$NAME-r$r" up
done
for n in $NODES; do
    rack=$((n / 2))
    ip netns add "$NAME-$n" 2>/dev/null || skip "network namespaces are not permitted here"
    ip link add "$NAME-v$n" type veth peer name "$NAME-e$n"
    ip link set "$NAME-e$n" netns "$NAME-$n"
    ip link set "$NAME-v$n" master "$NAME-r$rack" up
    ip -n "$NAME-$n" addr add "10.219.0.$((n + 1))/24" dev "$NAME-e$n"
    ip -n "$NAME-$n" link set "$NAME-e$n" up
    ip -n "$NAME-$n" link set lo up
    if [ "$MBIT" -gt 0 ]; then shape "$NAME-e$n" "$MBIT" 64kb ip netns exec "$NAME-$n"; fi
done
if [ -n "$ACROSS" ]; then
    ip link add "$NAME-x0" type veth peer name "$NAME-x1"
    for r in $RACKS; do
        ip link set "$NAME-x$r" master "$NAME-r$r" up
        shape "$NAME-x$r" "$ACROSS" 16kb env
    done
fi

node() {
    GLOO_SOCKET_IFNAME="$NAME-e$1" OMP_NUM_THREADS=1 ip netns exec "$NAME-$1" "$PYTHON" -m torch.distributed.run \
        --nnodes "$(echo $NODES | wc -w)" --node-rank "$1" --nproc-per-node 2 \
        --master-addr 10.219.0.1 --master-port "$PORT" \
        -m tpplan profile --quick --no-resume --quiet -o "$OUTPUT"
}
others=
for n in $NODES; do
    if [ "$n" -gt 0 ]; then
        node "$n" >/dev/null &
        others="$others $!"
    fi
done
node 0 >/dev/null
for other in $others; do wait "$other"; done

"$PYTHON" - "$OUTPUT" "$MBIT" "$ACROSS" <<'REPORT'
import sys
from pathlib import Path

from tpplan.topologies import load_file

topology, (mbit, across) = load_file(Path(sys.argv[1])), (float(text or 0) for text in sys.argv[2:4])
shaped = [mbit / 2, across / 4] if across else [mbit / 2]
print(f"{len(topology.levels)} tiers: {' x '.join(str(level.size) for level in topology.levels)}")
for level, limit in zip(topology.levels, [0.0, *shaped]):
    told = f"{level.name}: {level.bytes_per_s / 1e6:.1f} MB/s for each device"
    share = level.bytes_per_s / (limit * 1e6 / 8) if limit else None
    missing = " (not measured: the time budget ended)" if "not measured" in level.source else ""
    print(told + (f", {share:.1%} of the shaped rate" if share else "") + missing)
inside, between = topology.levels[0].bytes_per_s, topology.levels[1].bytes_per_s
print(f"inside a node {inside / between:.0f} times what leaves it")
REPORT
