"""All-to-all dispatcher that reads one tensor from the device."""
