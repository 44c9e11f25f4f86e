"""SwiGLU through the operator mindspeed::swiglu."""
