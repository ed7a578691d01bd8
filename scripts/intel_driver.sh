#!/usr/bin/env bash
# Run a command where OpenVINO finds an Intel GPU that is not there: Intel's own driver, told to
# write down what it would send to a device.
#
#     scripts/intel_driver.sh pytest tests/providers/test_openvino_gpu.py
#
# OpenVINO's GPU plugin then compiles graphs, kernels included, and takes memory, which as that of an
# integrated GPU is the host's: the host writes and reads it. Nothing is computed, nor copied by the
# device. Needs Intel's OpenCL driver; OCL_ICD_VENDORS and LD_LIBRARY_PATH say where, if it is not
# installed.
set -euo pipefail

fail() { echo "$0: $1" >&2; exit 1; }

[[ $# -gt 0 ]] || fail "give the command to run"
[[ $(uname -sm) == "Linux x86_64" ]] || fail "works on Linux on x86-64 only"
grep -qs igdrcl "${OCL_ICD_VENDORS:-/etc/OpenCL/vendors}"/*.icd ||
  fail "there is no Intel OpenCL driver; on Debian: apt install intel-opencl-icd"

log=$(mktemp -d)
trap 'rm -rf "$log" kernel.errors.txt' EXIT  # the latter is the compiler's, of features it lacks
# Keys of the driver: read these; write to a file instead of a device; which GPU; where to.
NEOReadDebugKeys=1 SetCommandStreamReceiver=1 ProductFamilyOverride=tgllp \
  HardwareInfoOverride=default AUBDumpCaptureFileName="$log/commands.aub" "$@"
