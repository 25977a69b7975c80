"""What an Apache broker left on its disk becomes a neve broker's: its log, its tables, where its groups stood."""
