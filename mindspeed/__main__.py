"""``python -m mindspeed``: the same as the command ``mindspeed``."""

from mindspeed.cli import main

if __name__ == "__main__":
    main(prog_name="mindspeed")
