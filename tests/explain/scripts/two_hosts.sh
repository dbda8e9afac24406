# PYTHON NAMESPACE NAMESPACE ARGUMENTS...: torchrun with two ranks in each of two network namespaces
python=$1; near=$2; far=$3; shift 3
node() {
    GLOO_SOCKET_IFNAME=$2 ip netns exec "$2" "$python" -m torch.distributed.run --nnodes=2 \
        --nproc-per-node=2 --node-rank="$1" --master-addr=10.77.0.1 --master-port=29533 "${@:3}"
}
node 1 "$far" "$@" & second=$!
node 0 "$near" "$@"; status=$?
wait "$second" || status=$?
exit "$status"
