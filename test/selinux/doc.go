// Package selinux shows what the plugin does where SELinux is enforcing: in a virtual machine of test/vm, whose kernel is
// started with it, and with a small policy of its own. Begin with TestVolumeHasTheLabelOfItsPod.
package selinux
