"""Send the same requests again and again, each over its own connection, until standard input ends.

    request_flood.py PORT < requests        each request is its length in a line, then the bytes as they are sent

It writes a line with the statuses after as many answers as there are requests.
"""

from __future__ import annotations

import socket
import sys
import threading


def ask_on(port: int, request: bytes, statuses: list[str], answered: threading.Semaphore) -> None:
    """Send a request and read its answer, for as long as the service answers."""
    with socket.create_connection(("127.0.0.1", port)) as line, line.makefile("rb") as answers:
        while True:
            line.sendall(request)
            status = answers.readline().split()
            size = 0
            while (header := answers.readline().lower()) not in (b"\r\n", b""):
                if header.startswith(b"content-length:"):
                    size = int(header.split()[1])
            if not status or len(answers.read(size)) < size:
                return
            statuses.append(status[1].decode())
            answered.release()


def main() -> None:
    """Read the requests, send them, and end when nothing can be read any more."""
    port, given, requests = int(sys.argv[1]), sys.stdin.buffer, []
    while size := int(given.readline()):
        requests.append(given.read(size))
    statuses: list[str] = []
    answered = threading.Semaphore(0)
    for request in requests:
        threading.Thread(target=ask_on, args=(port, request, statuses, answered), daemon=True).start()
    for _ in requests:
        answered.acquire(timeout=60)
    sys.stdout.write(" ".join(sorted(set(statuses))) + "\n")
    sys.stdout.flush()
    given.read()


if __name__ == "__main__":
    main()
