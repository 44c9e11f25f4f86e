"""RMSNorm through the operator mindspeed::rms_norm."""
