"""The actor model in one process: endpoints, mailboxes, executors, ports, interrupts and deadlocks."""
