"""What a run did: one row an update, FLOPs and memory, sinks, timeline and report. Reads types; decides nothing."""
