#!/bin/bash
# The fourteen rows of docs/performance.md in bf16, then the ordinary step by torch.compile of four of them in float32,
# in at most six minutes on a GPU. See gpu_environment.sh.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/gpu_environment.sh"
rows bf16 130 --precision bf16 --rounds 2 --row-seconds 30 "$@"
rows compiled 0 --precision float32 --rounds 2 --row-seconds 80 --names W2,W3,W5,bert --methods ordinary-compiled,captured "$@"
