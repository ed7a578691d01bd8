"""The `openvino` provider: OpenVINO itself, with its own paged attention."""
