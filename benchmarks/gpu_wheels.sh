#!/bin/bash
# Download what a machine with a GPU and no network lacks beside torch, as wheels, in the versions of
# requirements-dev.txt: benchmarks/gpu_wheels.sh [FOLDER]. PACKAGES names others, PYTHON_VERSION another Python.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.wheels}
most=64 # MiB, all together
packages=${PACKAGES:-opacus dp-accounting dm-tree cryptography cffi pycparser rich markdown-it-py mdurl pygments annotated-types}

wanted=()
for package in $packages; do
    line=$(grep -i "^$package==" requirements-dev.txt) || { echo "gpu_wheels: requirements-dev.txt has no $package" >&2; exit 1; }
    wanted+=("${line%% *}")
done
platforms=()
for glibc in 17 24 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
rm -rf "$folder"
mkdir -p "$folder"
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary :all: --python-version "${PYTHON_VERSION:-3.12}" \
    --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
    --dest "$folder" "${wanted[@]}"
du --human-readable "$folder"/*.whl
size=$(du --summarize --bytes "$folder" | cut --fields 1)
echo "$((size / 2**20)) MiB of at most $most"
[ "$size" -le $((most * 2**20)) ]
