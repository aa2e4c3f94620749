#!/usr/bin/env bash
# Waits until FOLDER announces COUNT servers and each answers /health, then prints their URLs on one line.
#   wait_healthy.sh FOLDER COUNT [LIMIT_S]
set -euo pipefail
folder=${1:?folder} count=${2:?number of servers} limit_s=${3:-1800}
deadline=$((SECONDS + limit_s))
ask='import sys, urllib.request as r; [r.urlopen(url + "/health", timeout=5) for url in sys.argv[1:]]'
healthy() {
    python -c "$ask" "$@" 2>/dev/null
}
while :; do
    mapfile -t urls < <(find "$folder" -maxdepth 1 -type f ! -name '.*' -exec cat {} + 2>/dev/null | sort)
    [ ${#urls[@]} -ge "$count" ] && healthy "${urls[@]}" && break
    if [ $SECONDS -ge $deadline ]; then
        echo "${#urls[@]} of $count servers announced in $folder within $limit_s s: ${urls[*]}" >&2
        exit 1
    fi
    sleep 2
done
echo "${urls[*]}"
