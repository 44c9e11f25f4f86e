"""The model of a job's memory: bytes of each pipeline stage of a plan (`plans`), and of many layouts at once (`layouts`)."""
