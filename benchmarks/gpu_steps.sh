#!/bin/bash
# The fourteen rows of docs/performance.md in float32, in at most six minutes on a GPU: the ordinary step, privgrad's,
# its captured one and Opacus' ghost clipping, with first steps, checks and memory. See gpu_environment.sh.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/gpu_environment.sh"
rows float32 0 --precision float32 --row-seconds 40 "$@"
