"""The demo: export the bundled checkpoint, check it, serve it, and print one streamed answer.

Run by `make demo`, which installs onnxport first. Uses the command line and plain HTTP, as a new
user would, and fails when any step does.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "demo" / "model"
ARTIFACT = ROOT / "demo" / "build" / "portia"
ONNXPORT = Path(sys.executable).with_name("onnxport")
QUESTION = "What is onnxport?"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


def say(text: str) -> None:
    """Print one heading."""
    print(f"\n== {text}", flush=True)


def run(*arguments: str) -> None:
    """Show and run one onnxport command; end the demo with its exit code if it fails."""
    print("$ onnxport " + " ".join(arguments), flush=True)
    code = subprocess.run([ONNXPORT, *arguments], check=False).returncode
    if code:
        sys.exit(code)


def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return when the server answers /health; exit when it ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with exit code {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:  # none listens yet, or it is slow
            time.sleep(0.1)
    sys.exit(f"the server was not ready within {START_TIMEOUT_S:.0f} s")


def stream_answer(url: str, question: str) -> Iterator[str]:
    """Ask over /v1/chat/completions and yield the answer as it comes."""
    body = {
        "model": "portia",
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 128,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            name, _, data = line.decode().strip().partition(": ")
            if name == "data" and data != "[DONE]":  # a line without a name is a comment
                for choice in json.loads(data)["choices"]:
                    yield choice["delta"].get("content") or ""


def stop(server: subprocess.Popen[bytes]) -> int:
    """Ask the server to stop, and end it if it does not; returns its exit code."""
    server.send_signal(signal.SIGTERM)
    try:
        return server.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def main() -> None:
    """Run every step."""
    say("Export once")
    run("export", str(CHECKPOINT), str(ARTIFACT), "--precision", "int4", "--overwrite")
    say("Check the artifact on this machine")
    run("verify", str(ARTIFACT))
    say("Serve it and ask")
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    command = ["serve", str(ARTIFACT), "--port", port, "--served-model-name", "portia"]
    print("$ onnxport " + " ".join(command), flush=True)
    server = subprocess.Popen([ONNXPORT, *command], stderr=subprocess.DEVNULL)
    try:
        wait_until_healthy(url, server)
        print(f"user: {QUESTION}\nportia: ", end="", flush=True)
        answer = ""
        for piece in stream_answer(url, QUESTION):
            answer += piece
            print(piece, end="", flush=True)
        print()
        if not answer.strip():
            sys.exit("the server gave an empty answer")
    finally:
        code = stop(server)
    if code != 0:
        sys.exit(f"the server stopped with exit code {code}")
    say("The server stopped cleanly. Try: .venv/bin/onnxport chat demo/build/portia")


if __name__ == "__main__":
    main()
