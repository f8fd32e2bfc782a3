"""Tests of the HTTP server, over real sockets, in this process."""
