#!/usr/bin/env bash
# Build a wheel of Horovod for a Python, and install it there (minutes; needs cmake and g++):
#
#   build_horovod.sh PYTHON FOLDER
#
# 0.28.1 of June 2023 is its last release. It asks for C++14; the headers of torch 2 need C++17.
set -e
python=$1 folder=$2 version=0.28.1
mkdir -p "$folder"
cd "$folder"
"$python" -m pip download -q --no-deps --no-build-isolation --no-binary :all: "horovod==$version"
tar xzf "horovod-$version.tar.gz"
cd "horovod-$version"
sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' CMakeLists.txt horovod/torch/CMakeLists.txt
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
# gloo's own CMake file is older than CMake 4 accepts.
export CMAKE_POLICY_VERSION_MINIMUM=3.5
"$python" -m pip wheel -q --no-deps --no-build-isolation -w .. .
"$python" -m pip install -q --no-deps ../horovod-"$version"-*.whl
