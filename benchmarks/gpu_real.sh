#!/bin/bash
# Models of the sizes that people fine-tune, in bf16 and with checkpointing, in at most six minutes on a GPU: the
# ordinary step, privgrad's and Opacus' ghost clipping, with memory. See gpu_environment.sh and real_sizes.py.
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/gpu_environment.sh"
rows real 0 --precision bf16 --rounds 2 --row-seconds 85 --methods plain,opacus-ghost \
    --names gpt2-124m,llama-1.1b-lora,bert-base,vit-base "$@"
