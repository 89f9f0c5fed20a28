"""``python -m smp_emulation``: every call that is covered, and what it does."""

from smp_emulation.installing import CALLS

if __name__ == "__main__":
    for call in sorted(CALLS, key=lambda call: call.name):
        print(f"{call.name:60} {call.does}")
