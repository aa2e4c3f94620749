#!/usr/bin/env bash
# The servers of one machine: started, awaited, announced as $MEGATHUNDER_SHARED/servers/HOST-INDEX (one line, the URL).
# Environment: MODEL, MEGATHUNDER_SHARED, MEGATHUNDER_API_KEY; GPUS (8), GPUS_PER_SERVER (1), PORT (30000). Arguments go
# to SGLang. Ends, and takes its announcements back, when any server ends.
set -euo pipefail

gpus=${GPUS:-8} each=${GPUS_PER_SERVER:-1} port=${PORT:-30000} host=${SERVER_HOST:-$(hostname)}
limit_s=${STARTUP_TIMEOUT_S:-1200}
announced=()
finish() {
    rm -f "${announced[@]}"
    kill $(jobs -p) 2>/dev/null || true
    wait
}
trap finish EXIT
trap 'exit 143' TERM INT

for ((index = 0; index * each < gpus; index++)); do
    python -m sglang.launch_server --model-path "$MODEL" --host "$host" --port $((port + index)) \
        --tp-size "$each" --base-gpu-id $((index * each)) --dtype "${DTYPE:-bfloat16}" --weight-version 0 \
        --api-key "$MEGATHUNDER_API_KEY" --skip-tokenizer-init --skip-server-warmup --log-level warning "$@" &
done

deadline=$((SECONDS + limit_s))
for ((i = 0; i < index; i++)); do
    url="http://$host:$((port + i))"
    until python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' "$url/health" 2>/dev/null; do
        [ $SECONDS -lt $deadline ] || { echo "$url was not healthy within $limit_s s" >&2; exit 1; }
        [ "$(jobs -rp | wc -l)" = "$index" ] || { echo "a server of $host ended before it was healthy" >&2; exit 1; }
        sleep 1
    done
    announcement="$MEGATHUNDER_SHARED/servers/$host-$i"
    echo "$url" >"$announcement.partial" && mv "$announcement.partial" "$announcement"
    announced+=("$announcement")
done
status=0
wait -n || status=$?
echo "a server of $host ended with status $status" >&2
exit 1
