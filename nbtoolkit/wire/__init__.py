"""What crosses a process: messages, sockets, pickles, the function and its arrays, signals."""
