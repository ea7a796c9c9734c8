"""rulec with the oldest and with the newest versions of what it needs: `python -m tests.versions oldest|newest`."""
