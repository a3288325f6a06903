-- An example for sites that want each job with `srun --auto-resume=1` in its script prepared for it:
-- JobSubmitPlugins=lua in slurm.conf, and this file beside it, as job_submit.lua. Take what you want.
--
-- slurmctld lets Lua change --requeue, and neither --no-kill nor --open-mode, so this tells the user
-- of these. `sbatch --auto-resume=1` (or #SBATCH --auto-resume=1) sets all three, where the SPANK
-- plugin is installed, and then this has nothing to add.

local NOT_GIVEN = slurm.NO_VAL16 or 65534

-- Whether a line of the script, a directive or a command, has all of these words.
local function script_has(job, is_directive, ...)
	for line in (job.script or ""):gmatch("[^\n]+") do
		local found = (line:find("^#SBATCH") ~= nil) == is_directive
		if not is_directive and line:find("^%s*#") then
			found = false
		end
		for _, word in ipairs({ ... }) do
			found = found and line:find(word, 1, true) ~= nil
		end
		if found then
			return true
		end
	end
	return false
end

function slurm_job_submit(job, partitions, uid)
	if not script_has(job, false, "srun", "--auto-resume=1") then
		return slurm.SUCCESS
	end
	-- Where nothing else helps, the job starts again on other nodes. --no-requeue is respected.
	if job.requeue == NOT_GIVEN then
		job.requeue = 1
	end
	if not script_has(job, true, "--no-kill") and not script_has(job, true, "--auto-resume") then
		slurm.log_user("srun --auto-resume=1: add #SBATCH --auto-resume=1 to this script, so that "
			.. "the job outlives a lost node and keeps its log when it is requeued")
	end
	return slurm.SUCCESS
end

function slurm_job_modify(job, old, partitions, uid)
	return slurm.SUCCESS
end
