"""The emulation of a device on the CPU: missing waits, early reads and lost overlap are seen without an accelerator."""
