#!/usr/bin/env bash
# Ask a running server a few things with curl alone:  scripts/smoke.sh [http://127.0.0.1:8000/v1]   (key: VLLM_API_KEY)
set -uo pipefail
url=${1:-http://127.0.0.1:${PORT:-8000}/v1}; failed=0
auth=(-H "Authorization: Bearer ${VLLM_API_KEY:-none}" -H 'Content-Type: application/json')
check() { # NAME WANTED_STATUS CURL_ARGS…
    local name=$1 wanted=$2 status; shift 2
    status=$(curl -s -o /dev/null -w '%{http_code}' --max-time 120 "${auth[@]}" "$@") || true
    [[ $status == "$wanted" ]] && verdict=ok || { verdict=FAIL; failed=1; }
    printf '%-28s %s (HTTP %s, wanted %s)\n' "$name" "$verdict" "$status" "$wanted"
}
model=$(curl -s --max-time 10 "${auth[@]}" "$url/models" | sed -n 's/.*"data":\[{"id":"\([^"]*\)".*/\1/p')
if [[ -z $model ]]; then
    status=$(curl -s -o /dev/null -w '%{http_code}' --max-time 10 "${auth[@]}" "$url/models") || true
    [[ $status == 401 ]] && why="set VLLM_API_KEY to the server's key" || why="start one with scripts/serve, or pass its URL"
    [[ $status == 000 ]] && seen="no connection" || seen="HTTP $status"
    echo "error: no OpenAI endpoint answers at $url ($seen): $why." >&2; exit 1
fi
message='"messages":[{"role":"user","content":"Say hello."}]'
check health 200 "${url%/v1}/health"
check models 200 "$url/models"
check chat 200 "$url/chat/completions" -d "{\"model\":\"$model\",$message,\"max_tokens\":8}"
check streaming 200 "$url/chat/completions" -d "{\"model\":\"$model\",$message,\"max_tokens\":8,\"stream\":true,\"stream_options\":{\"include_usage\":true}}"
check completions 200 "$url/completions" -d "{\"model\":\"$model\",\"prompt\":\"1, 2,\",\"max_tokens\":8}"
tool='{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}'
check 'tool request' 200 "$url/chat/completions" -d "{\"model\":\"$model\",$message,\"tools\":[$tool],\"max_tokens\":16}"
# The embedded model is asked what it answers exactly.
if [[ $(curl -s --max-time 10 "${auth[@]}" "$url/models") == *'reference/moe"'* ]]; then
    answer=$(curl -s --max-time 120 "${auth[@]}" "$url/chat/completions" -d "{\"model\":\"$model\",\"messages\":[{\"role\":\"user\",\"content\":\"so, reverse these items: 66 30 24\"}],\"temperature\":0,\"max_tokens\":16,\"chat_template_kwargs\":{\"enable_thinking\":false}}") || true
    [[ $answer == *'"content":"24 30 66"'* ]] && verdict=ok || { verdict=FAIL; failed=1; }
    printf '%-28s %s (wanted 24 30 66)\n' 'known answer' "$verdict"
fi
check 'wrong model' 404 "$url/chat/completions" -d "{\"model\":\"no-such-model\",$message}"
check 'broken JSON' 400 "$url/chat/completions" -d '{"model": '
check 'over-long prompt' 400 "$url/completions" -d "{\"model\":\"$model\",\"prompt\":\"x\",\"max_tokens\":100000000}"
exit $failed
