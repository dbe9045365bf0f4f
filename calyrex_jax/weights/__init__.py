"""Where a backbone's weights come from, and how they become its parameter tree and go back."""
