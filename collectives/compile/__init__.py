"""From a schedule to what running it needs: its data flow, its cost, its number of segments."""
