"""A schedule bound to buffers and run: by messages, or by loads and stores in shared memory."""
