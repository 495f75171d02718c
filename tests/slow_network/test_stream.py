import socket
import threading

from benchmarks.slow_network.stream import CHUNK, receive, send


def test_a_stream_is_counted_until_it_is_over() -> None:
    ours, theirs = socket.socketpair()
    is_over = threading.Event()
    sender = threading.Thread(target=send, args=(ours, is_over))
    sender.start()
    num_bytes, seconds = receive(theirs, 0.05)
    assert num_bytes >= len(CHUNK) and seconds >= 0.05
    is_over.set()
    theirs.close()
    sender.join(timeout=10)
    assert not sender.is_alive() and ours.fileno() == -1
