def third():
    return "third"
