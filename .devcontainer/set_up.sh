#!/usr/bin/env bash
# Sets the course up in a new container. Without an NVIDIA GPU it takes the CPU build of
# PyTorch where that can be had, which saves 5 of 6 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# pip must be told where the CPU build is; uv knows it by name.
cpu_build() {
    local pins
    mapfile -t pins < <(grep -E '^torch(vision)?==' requirements.txt)
    .venv/bin/python -m pip install --quiet uv &&
        .venv/bin/python -m uv pip install --python .venv/bin/python \
            --torch-backend cpu "${pins[@]}"
}

has_torch() {
    compgen -G '.venv/lib/python3*/site-packages/torch' >/dev/null
}

# A set-up that was stopped leaves .venv without torch.
if ! has_torch && ! command -v nvidia-smi >/dev/null; then
    [ ! -e .venv ] || echo ".venv has no PyTorch: making it again."
    rm -rf .venv
    python3 -m venv .venv
    cpu_build || echo "No CPU build of PyTorch to be had here: taking the ordinary one."
fi
# Installs what is still missing, and makes .venv if there is none.
python3 -c "
import sys
from course_utils.setup.environment import SetupError
from course_utils.setup.installer import ensure
try:
    ensure()
except SetupError as error:
    sys.exit(str(error))
"
