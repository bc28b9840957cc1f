#!/bin/sh
# An emulated cluster of two nodes: network namespaces joined by a bridge, each node's link shaped with
# `tc tbf`. Profiles it with 2 x 2 gloo ranks and compares the measured bandwidth with the shaped one.
#
#     benchmarks/two_tier.sh [MBIT] [OUTPUT]        MBIT 0: not shaped
#
# Needs root and iproute2; says why and ends with 0 where that is not permitted. Cleans up after itself.
set -eu
MBIT=${1:-200}
OUTPUT=${2:-two_tier.yaml}
PYTHON=${PYTHON:-python3}
NAME=tpp$$
PORT=$((20000 + $$ % 20000))

skip() {
    echo "two_tier: skipped: $1" >&2
    exit 0
}
[ "$(id -u)" = 0 ] || skip "needs root for network namespaces"
command -v ip >/dev/null && command -v tc >/dev/null || skip "needs iproute2 (ip and tc)"

clean() {
    for n in 0 1; do ip netns del "$NAME-$n" 2>/dev/null || true; done
    ip link del "$NAME" 2>/dev/null || true
}
trap clean EXIT INT TERM
ip link add "$NAME" type bridge 2>/dev/null || skip "bridges are not permitted here"
ip link set "$NAME" up
for n in 0 1; do
    ip netns add "$NAME-$n" 2>/dev/null || skip "network namespaces are not permitted here"
    ip link add "$NAME-v$n" type veth peer name "$NAME-e$n"
    ip link set "$NAME-e$n" netns "$NAME-$n"
    ip link set "$NAME-v$n" master "$NAME" up
    ip -n "$NAME-$n" addr add "10.219.0.$((n + 1))/24" dev "$NAME-e$n"
    ip -n "$NAME-$n" link set "$NAME-e$n" up
    ip -n "$NAME-$n" link set lo up
    if [ "$MBIT" -gt 0 ]; then
        ip netns exec "$NAME-$n" tc qdisc add dev "$NAME-e$n" root tbf rate "${MBIT}mbit" burst 64kb latency 200ms ||
            skip "tc tbf is not permitted here"
    fi
done

node() {
    GLOO_SOCKET_IFNAME="$NAME-e$1" OMP_NUM_THREADS=1 ip netns exec "$NAME-$1" "$PYTHON" -m torch.distributed.run \
        --nnodes 2 --node-rank "$1" --nproc-per-node 2 --master-addr 10.219.0.1 --master-port "$PORT" \
        -m tpplan profile --quick --no-resume --quiet -o "$OUTPUT"
}
node 1 >/dev/null &
node 0 >/dev/null
wait $!

"$PYTHON" - "$OUTPUT" "$MBIT" <<'REPORT'
import sys
from pathlib import Path

from tpplan.topologies import load_file

topology, mbit = load_file(Path(sys.argv[1])), float(sys.argv[2])
inside, across = (level.bytes_per_s for level in topology.levels)
print(f"inside a node {inside / 1e6:.1f} MB/s, between nodes {across / 1e6:.1f} MB/s for each of 2 devices")
if mbit:
    shaped = mbit * 1e6 / 8 / 2
    print(f"shaped {shaped / 1e6:.1f} MB/s for each of 2 devices: {across / shaped:.1%} of it, {inside / across:.0f}x inside")
REPORT
