"""`python -m training.coordinator CONFIG_FILE`."""

from training.coordinator.server import main

if __name__ == "__main__":
    main()
