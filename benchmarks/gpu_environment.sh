# What gpu_steps.sh and gpu_bf16.sh source: from the root of a clone, with the wheels of gpu_wheels.sh beside torch.
# PYTHON, WHEELS (a folder), OUT (a folder), DEVICE and SECONDS_IN_ALL choose, and COMMIT names the commit where git is
# not. Further arguments go to benchmarks.gpu, the last of one name counts.
# shellcheck shell=bash
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=${PYTHON:-python3}
wheels=${WHEELS:-.wheels}
out=${OUT:-results/bench/gpu-$(date +%F)}
end=$(($(date +%s) + ${SECONDS_IN_ALL:-340})) # of six minutes, the rest to install and to end
export PYTHONPATH="$PWD/src:$PWD" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
if compgen -G "$wheels/*.whl" >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
    PYTHONPATH="$PYTHONPATH:$site"
fi
mkdir -p "$out"

# Measure rows into a file of this name until so many seconds before the end: rows NAME SECONDS OPTIONS.
rows() {
    local file=$1 last=$((end - $2))
    local left=$((last - $(date +%s)))
    shift 2
    timeout --kill-after 5 $((left > 0 ? left + 10 : 1)) "$python" -m benchmarks.gpu --device "${DEVICE:-cuda}" \
        --out "$out/$file.jsonl" --end "$last" "$@"
}
