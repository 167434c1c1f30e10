// Package blockdev is what is the same for every block device, whoever keeps it:
// what it is, who has it, and how it is made zero.
package blockdev
