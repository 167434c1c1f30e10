// Package state holds what the rest of the plugin talks about: what is wanted of
// a volume (Volume), what is seen of it (Actual), what a failure means (Error),
// and the Store, which keeps the wanted so that no crash forgets it.
//
// The store is one bbolt file:
//
//	intents.db
//	├── meta
//	│   ├── version      "1"; the schema is additive, so readers accept every version
//	│   └── boot         the kernel's boot id; under another one no record counts
//	├── records          its sequence is the last revision given out
//	│   └── <volume id>  a Volume
//	└── bad              records that could not be read, kept for a human
//	    └── <volume id>  the bytes as they were found
//
// The values of meta and records are sealed: the CRC-32C of the text in eight
// hexadecimal digits, a space, and the text, which for a Volume is JSON. bbolt
// has no checksum over its data, and a path with a flipped bit is a wrong mount.
package state
