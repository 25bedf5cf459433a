# Shell of k8e's code interpreter: an interactive bash without a terminal, which reads commands from its standard input.
# Interactive, because an interrupt then ends the command that runs and not the shell. What it says itself until it is
# ready is not shown to anybody.
if [[ $- != *i* ]]; then
    unset PROMPT_COMMAND HISTFILE
    exec 198>&1 199>&2
    # This file again, as what an interactive shell reads first.
    exec bash --noprofile --noediting --rcfile "$0" -i
fi
PS1= PS2=
set +o history +H
shopt -u checkwinsize
# Marks the end of an execution on both streams, wherever they were redirected.
__k8e_end() {
    printf '\0k8e %s\n' "$1" >&198
    printf '\0k8e %s\n' "$1" >&199
}
__k8e_end ready
