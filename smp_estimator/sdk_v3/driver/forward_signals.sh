# Read by ModelTrainer's sm_train.sh, in its own shell, right after that has started the driver in the background.
#
# The platform stops a job with SIGTERM to the container's first process, which is that shell: as the first process it
# ignores a signal that it has no trap for, and a shell runs its traps only between commands, or out of "wait".
smp_driver=$!
smp_status=0
trap 'kill -TERM "$smp_driver" 2>/dev/null || true' TERM INT HUP
# A signal ends "wait", not the driver.
while kill -0 "$smp_driver" 2>/dev/null; do
    wait "$smp_driver" || true
done
# The shell remembers how a process ended that is gone.
wait "$smp_driver" || smp_status=$?
trap - TERM INT HUP
(exit "$smp_status")
