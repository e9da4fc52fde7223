"""What a training and its launchers agree on: exit codes, and the file that asks for a stop."""

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75  # STOPPED: with a checkpoint saved, to be started again

STOP_FILE = "stop_requested"  # in the run's folder
LAUNCHER = "launcher: "  # how its text begins where no person wrote it
