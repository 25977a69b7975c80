"""The controller: who is master of a broker set, and who may become it. Start reading at decision."""
