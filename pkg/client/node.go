package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// statsAge is the response header that holds the age of the values of
// NodeGetVolumeStats, if the plugin has them from an earlier look.
const statsAge = "csi-node-stats-age"

// Stages reports whether the driver stages volumes. With one that does not, volumes
// are published at once, without a staging path.
func (c *Client) Stages(ctx context.Context) (bool, error) {
	return c.nodeOffers(ctx, csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME)
}

// Stage makes the staging directory and calls NodeStageVolume.
func (c *Client) Stage(ctx context.Context, req *csi.NodeStageVolumeRequest) error {
	return within(req.GetStagingTargetPath(), func() error {
		_, err := c.Node.NodeStageVolume(ctx, req)
		return explain(err, "stage volume %s at %s", req.GetVolumeId(), req.GetStagingTargetPath())
	})
}

// Publish makes the parents of the target and calls NodePublishVolume.
func (c *Client) Publish(ctx context.Context, req *csi.NodePublishVolumeRequest) error {
	return within(filepath.Dir(req.GetTargetPath()), func() error {
		_, err := c.Node.NodePublishVolume(ctx, req)
		return explain(err, "publish volume %s at %s", req.GetVolumeId(), req.GetTargetPath())
	})
}

// within creates a directory for a call. If the call fails for good, the directories
// that were created are removed again.
func within(dir string, call func() error) error {
	made, err := makeDirs(dir)
	if err == nil {
		err = call()
	}
	if err != nil && !underWay(err) {
		err = errors.Join(err, removeEmpty(made))
	}
	return err
}

// Unpublish calls NodeUnpublishVolume, and removes the empty parents of a default
// target.
func (c *Client) Unpublish(ctx context.Context, volume string, paths Paths) error {
	_, err := c.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: paths.Target})
	if err != nil {
		return explain(err, "unpublish volume %s from %s", volume, paths.Target)
	}
	return paths.tidyTarget()
}

// Unstage calls NodeUnstageVolume, and removes a default staging directory and the
// volume's own directory if they are empty.
func (c *Client) Unstage(ctx context.Context, volume string, paths Paths) error {
	_, err := c.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: volume, StagingTargetPath: paths.Staging})
	if err != nil {
		return explain(err, "unstage volume %s from %s", volume, paths.Staging)
	}
	return paths.tidyStaging()
}

// Expand grows a volume to the required bytes of req: by ControllerExpandVolume if the
// driver offers that, and by NodeExpandVolume unless the controller says that it is
// not needed. It returns the capacity in bytes, 0 if the driver does not report it.
func (c *Client) Expand(ctx context.Context, req *csi.NodeExpandVolumeRequest) (int64, error) {
	byController, err := c.controllerOffers(ctx, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME)
	if err != nil {
		return 0, err
	}
	byNode, err := c.nodeOffers(ctx, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	switch {
	case err != nil:
		return 0, err
	case !byController && !byNode:
		return 0, errors.New("the driver cannot grow volumes: neither its controller nor its node service has the capability EXPAND_VOLUME")
	}
	bytes := int64(0)
	if byController {
		resp, err := c.Controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
			VolumeId: req.GetVolumeId(), CapacityRange: req.GetCapacityRange(), Secrets: req.GetSecrets(), VolumeCapability: req.GetVolumeCapability(),
		})
		if err != nil {
			return 0, explain(err, "expand volume %s (controller)", req.GetVolumeId())
		}
		bytes = resp.GetCapacityBytes()
		if !resp.GetNodeExpansionRequired() {
			return bytes, nil
		}
	}
	if !byNode {
		return bytes, fmt.Errorf("volume %s has %d bytes now, and its controller wants the node to grow it too, which the node service does not offer", req.GetVolumeId(), bytes)
	}
	resp, err := c.Node.NodeExpandVolume(ctx, req)
	if err != nil {
		return bytes, explain(err, "expand volume %s at %s", req.GetVolumeId(), req.GetVolumePath())
	}
	return max(bytes, resp.GetCapacityBytes()), nil
}

// Stats calls NodeGetVolumeStats. age is the age of the values, as the plugin
// writes it; "" if it does not report one.
func (c *Client) Stats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (resp *csi.NodeGetVolumeStatsResponse, age string, err error) {
	if err := c.needNode(ctx, csi.NodeServiceCapability_RPC_GET_VOLUME_STATS); err != nil {
		return nil, "", err
	}
	var header metadata.MD
	resp, err = c.Node.NodeGetVolumeStats(ctx, req, grpc.Header(&header))
	if err != nil {
		return nil, "", explain(err, "stats of volume %s at %s", req.GetVolumeId(), req.GetVolumePath())
	}
	if ages := header.Get(statsAge); len(ages) > 0 {
		age = ages[0]
	}
	return resp, age, nil
}

// Shown returns the path at which a volume is likely to be seen: the target if
// something is there, else the staging path.
func (p Paths) Shown() string {
	if _, err := os.Lstat(p.Target); err == nil || p.Staging == "" {
		return p.Target
	}
	return p.Staging
}
