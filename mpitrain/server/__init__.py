"""Parameters that lie with servers: workers pull them, and push gradients when they have them.

A run goes from one *meeting* of all ranks to the next.  Between two meetings each worker takes its
part of every batch, in turn and at its own pace; servers apply what arrives, each worker in turn.
"""
