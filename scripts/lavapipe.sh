#!/usr/bin/env bash
# Run a command where ONNX Runtime's WebGPU plugin takes Mesa's lavapipe, a Vulkan device in
# software that has 16-bit floats, for a GPU:
#
#     sudo scripts/lavapipe.sh .venv-webgpu-plugin/bin/pytest tests/conformance --lane webgpu …
#
# ONNX Runtime looks for GPUs in /sys/class/drm alone. Where there is none, this shows the command,
# and nobody else, a made-up one, in a mount namespace of its own; that takes root.
set -euo pipefail

driver=${LAVAPIPE_ICD:-/usr/share/vulkan/icd.d/lvp_icd.json}
fail() { echo "$0: $1" >&2; exit 1; }

[[ $# -gt 0 ]] || fail "give the command to run"
[[ $(uname -s) == Linux ]] || fail "works on Linux only"
[[ -f $driver ]] || fail "there is no $driver; on Debian: apt install mesa-vulkan-drivers
(Mesa 25 or newer), or set LAVAPIPE_ICD to where it is"
if [[ -z ${LAVAPIPE_INSIDE:-} ]]; then
  [[ $EUID -eq 0 ]] || fail "needs root, to show the command a made-up GPU"
  LAVAPIPE_INSIDE=1 exec unshare --mount "$0" "$@"
fi

mount -t tmpfs none /sys/class
mkdir -p /sys/class/drm/card0/device
# An Intel display adapter, for vendor, device and class are all that is read.
echo 0x8086 >/sys/class/drm/card0/device/vendor
echo 0x1234 >/sys/class/drm/card0/device/device
echo 0x030000 >/sys/class/drm/card0/device/class
export VK_ICD_FILENAMES=$driver XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/tmp}
unset LAVAPIPE_INSIDE
exec "$@"
