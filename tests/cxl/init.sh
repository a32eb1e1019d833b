#!/bin/busybox sh
# The guest's first process: devices, and then a run that waits for its medium. @PYTHON@ and @RUN@ are filled in
# when the guest is built.
/bin/busybox --install -s /bin
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/tmp TMPDIR=/tmp
mkdir -p /proc /sys /dev /tmp /mnt /run
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mkdir -p /dev/shm
mount -t tmpfs none /dev/shm
ifconfig lo up  # where a group's ranks meet
echo 'guest: init'
for module in crc32c_generic crc32c_intel virtio_pci ext4; do modprobe $module; done
# QEMU keeps no state of CXL devices in a memory image: they are taken out before it is made, and found again after it.
for device in /sys/bus/pci/devices/0000:0c:*; do echo 1 > "$device/remove"; done
# One thread: others would spin on the emulated processors.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_CBWR=AUTO,STRICT
export GLOO_SOCKET_IFNAME=lo
# QEMU 7.2 miscomputes NumPy's sorting with AVX2.
export NPY_DISABLE_CPU_FEATURES="AVX2 X86_V3"
@PYTHON@ @RUN@
echo "guest: exit $?"
poweroff -f
