#!/usr/bin/env bash
# Builds the extension, tests and measures it on a GPU: benchmarks/gpu.sh [options of benchmarks/gpu.py].
# Nothing is installed where python3 ($PYTHON) has what is needed; else what lacks is asked of pip, in an environment
# of its own. All of it takes 9 minutes at most. Run it again for the parts that there was no time for.
set -e
BEGUN=$(date +%s)
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
NEEDED="torch numpy onnx onnx_ir transformers rich pytest setuptools"

lacks() { "$PYTHON" -c 'import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])' $NEEDED; }

if [ -n "$(lacks)" ]; then
  echo "$PYTHON has no $(lacks): asking pip"
  "$PYTHON" -m venv --system-site-packages build/gpu-venv
  PYTHON=$PWD/build/gpu-venv/bin/python
  timeout 240 "$PYTHON" -m pip install --quiet $(lacks | tr _ -) || true
  [ -z "$(lacks)" ] || { echo "these are still missing: $(lacks)"; exit 2; }
fi
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$PYTHON" benchmarks/gpu.py --build --begun "$BEGUN" "$@"
