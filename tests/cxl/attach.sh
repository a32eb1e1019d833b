#!/bin/busybox sh
# attach.sh dax|disk|apart BOOT_ID [format]: finds the medium that the machine was given and mounts its ext4 at /mnt; of
# apart the CXL device there, and the disk, which is formatted already, at /log.
# The machine comes from a memory image, so the kernel is told which boot this is.
set -e
medium=$1 format=$3
echo "$2" > /tmp/boot_id
mount --bind /tmp/boot_id /proc/sys/kernel/random/boot_id

case $medium in
dax | apart)
  # The devices were taken out before the memory image was made; this finds them again, as after a boot.
  echo 1 > /sys/bus/pci/rescan
  for module in cxl_acpi cxl_pci cxl_mem cxl_pmem libnvdimm nd_pmem dax_pmem device_dax; do modprobe $module; done
  # A region that is made before these are there makes the kernel stumble.
  until [ -e /sys/bus/cxl/devices/mem0 ] && ls /sys/bus/cxl/devices | grep -q endpoint &&
    [ -e /sys/bus/nd/devices/nmem0 ]; do sleep 0.1; done
  # The label area is new with each life, so region and namespace are made anew; the data stay. Their page structs lie in
  # DRAM (map=mem): in the emulated device they would take a minute to write.
  cxl create-region -m -d decoder0.0 -t pmem -w 1 -g 256 mem0 > /tmp/region.log 2>&1
  until [ -e /dev/pmem0 ]; do
    ndctl create-namespace -f -m fsdax --map=mem -r region0 > /tmp/namespace.log 2>&1 || sleep 0.2
  done
  device=/dev/pmem0 options=dax=always
  ;;
disk)
  modprobe virtio_blk
  until [ -e /dev/vda ]; do sleep 0.1; done
  device=/dev/vda options=barrier
  ;;
esac

if [ "$format" = format ]; then
  # Nothing makes a block of the device whole or not there at all. A cut in the midst of the one that commits a
  # transaction of the journal is harmless, unless that has a checksum: then ext4 refuses to be mounted.
  mkfs.ext4 -q -F -O ^metadata_csum -b 4096 -N 1024 -J size=4 -E nodiscard "$device"
fi
echo 'guest: mounting'
mount -t ext4 -o "$options" "$device" /mnt
if [ "$medium" = apart ]; then
  modprobe virtio_blk
  until [ -e /dev/vda ]; do sleep 0.1; done
  mkdir -p /log
  mount -t ext4 -o barrier /dev/vda /log
fi
